"""Arguments for C functions, converted once instead of in every call.

A `ctypes` function with declared argument types converts each argument by a Python call: half of the time of a short
call, and more than half of its footprint in the CPU caches. Functions made here take what `pointer` and `size` return,
None for a null pointer, and plain integers for C's ``int``. Nothing checks this: a plain integer in place of a pointer
is truncated to 32 bits.
"""

from __future__ import annotations

import ctypes
from typing import Any

pointer = ctypes.c_void_p.from_param
size = ctypes.c_size_t.from_param


def prepare_function(library: ctypes.CDLL, name: str) -> Any:
    """A function of a library that takes prepared arguments and returns a C ``int``.

    Raises
    ------
    AttributeError
        The library has no such function.
    """
    function = library[name]
    function.restype = ctypes.c_int
    return function
