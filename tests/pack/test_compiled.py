"""The kernels compiled for a GPU that need not be there: they compile, move 16 bytes an access, pass 64 bits each."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from spanpack._kernels import gather_runs, gather_tiles

POINTERS = {"slab": "*u8", "tiles": "*i64", "addresses": "*i64"}

def check(kernel, most_lines=2000, num_warps=2, **constants):
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: POINTERS.get(name, "constexpr" if name in constants else "i64") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if name in POINTERS},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    ptx = compiled.asm["ptx"]
    loads, stores = ptx.count("ld.global.v2.b64"), ptx.count("st.global.v2.b64")
    vectors_per_thread = constants["TILE_BYTES"] // 16 // 32 // num_warps
    assert loads == stores == vectors_per_thread, (kernel.__name__, constants, loads, stores)
    assert compiled.metadata.shared == 0, (kernel.__name__, constants, compiled.metadata.shared)
    assert ptx.count("\\n") < most_lines, (kernel.__name__, constants, ptx.count("\\n"))
    about = compiled.metadata  # what spanpack.driver_launch looks at
    assert (about.target.backend, about.target.warp_size) == ("cuda", 32)
    assert (about.num_warps, about.num_ctas) == (num_warps, 1)
    assert not about.global_scratch_size and not about.launch_cooperative_grid
    parameters = re.findall(r"\\.param \\.(\\w+)", ptx[ptx.index(".entry"):ptx.index(")", ptx.index(".entry"))])
    assert set(parameters) == {"u64"} and len(parameters) == len(names) - len(constants) + 2, parameters

check(gather_runs, TILE_BYTES=4096)
check(gather_tiles, TILE_BYTES=4096, PASSED=True)
check(gather_tiles, TILE_BYTES=4096, PASSED=False)
check(gather_tiles, most_lines=6000, num_warps=4, TILE_BYTES=32768, PASSED=False)
"""


def test_runs_are_moved_16_bytes_at_a_time_in_little_code_and_not_by_way_of_shared_memory() -> None:
    """None of it is said in the code: the compiler has to see that addresses are aligned, and keep one layout.

    Ten thousand lines take it six seconds, for each of a dozen variants.
    """
    triton = pytest.importorskip("triton")
    if not hasattr(triton.backends, "backends") or "nvidia" not in triton.backends.backends:
        pytest.skip("this Triton has no compiler for NVIDIA GPUs")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
