"""Pack the outputs of one decode step and hand each request its own rows. Runs with or without a GPU."""

import torch

from spanpack import Batch, Packer, Placement

device = "cuda" if torch.cuda.is_available() else "cpu"
packer = Packer(device)

# What a model step yields: per-token rows, one tensor per request, and one for all.
payload = {
    "hidden": torch.arange(6.0, device=device).repeat(4, 1).T.contiguous(),  # [6 tokens, 4]
    "codes": [torch.tensor([7, 8], device=device), torch.tensor([9], device=device)],
    "bos": torch.ones(1, 4, dtype=torch.bfloat16, device=device),
}
batch = Batch(["first", "second"], num_scheduled_tokens=[4, 2])

snapshot = packer.pack(payload, batch, rules={"bos": Placement.INVARIANT})  # one launch, one copy, returns at once
payload["hidden"].zero_()  # the next step may overwrite its buffers right away

for request, views in snapshot.views().items():  # waits for the copy
    print(request, views["hidden"][:, 0].tolist(), views["codes"].tolist(), views["bos"].dtype)
