"""Load an export in speculators' form with speculators' own loader and compare: every tensor, the switches, the drafts.

Not a test: it needs an environment of its own, and a target folder under the name that the export gives it.

    python3 -m venv .venv-spec && .venv-spec/bin/pip install 'speculators==0.9.*'
    .venv-spec/bin/pip uninstall -y torchvision torchaudio
    PYTHONPATH=. .venv-spec/bin/python scripts/speculators_probe.py EXPORT
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version
from pathlib import Path

import torch

from headtrain.export.files import read_weights
from headtrain.export.folder import verify_folder
from headtrain.types import TargetWeights

STEPS, LENGTH = 2, 128  # their block mask of later steps wants whole blocks of 128 positions
TOLERANCE = 1e-4  # of the largest logit: the same products in another order (their RoPE positions start at 1)


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path, help="folder written by headtrain export --engine speculators")
    folder = parser.parse_args().export

    from speculators import SpeculatorModel

    verified = verify_folder(folder)
    head, stored = verified.head, read_weights(folder)
    print(f"speculators {version('speculators')}, {len(stored)} tensors, switches {head.config.model_dump()}")
    model = SpeculatorModel.from_pretrained(str(folder), dtype=torch.float32)
    print(f"loaded as {type(model).__name__}")
    own = model.state_dict()
    differing = [n for n, t in stored.items() if n not in own or not torch.equal(own[n].to(t.dtype), t)]
    ids = list(model.config.eagle_aux_hidden_state_layer_ids)
    print(f"tensors that differ: {differing or 'none'}; layer ids {ids}, trained {list(head.wants().layers)}")
    never = [n for n, t in own.items() if t.is_floating_point() and bool(t.isnan().any())]
    print(f"never loaded (NaN): {never or 'none'}")

    generator, n, size = torch.Generator().manual_seed(0), LENGTH, head.shape.hidden_size
    tokens = torch.randint(head.shape.vocab_size, (n,), generator=generator)
    layers = torch.randn(n, 3, size, generator=generator)
    logits: list[torch.Tensor] = []
    model.eval()
    model.lm_head.register_forward_hook(lambda _module, _inputs, out: logits.append(out[0]))
    model(
        hidden_states=layers.flatten(1)[None],
        input_ids=tokens[None],
        document_ids=torch.zeros(1, n, dtype=torch.long),
        ttt_steps=STEPS,
    )
    head.eval()
    embed = own["embed_tokens.weight"]
    head.attach(TargetWeights(embed, embed, torch.ones(size)))
    worst = 0.0
    for i in (3, 50, n - 2):  # their step 1 is fed the text's token, as the second draft of a session here
        session = head.session(max_length=n)
        mine = [session.extend(tokens[: i + 1], layers[: i + 1], torch.zeros(i + 1, size))]
        mine.append(session.expand(torch.tensor([-1]), tokens[i + 1 : i + 2])[0])
        for step, row in enumerate(mine):
            worst = max(worst, float((row - logits[step][i]).abs().max() / row.abs().max()))
    print(f"drafts of {STEPS} steps at three positions: largest difference {worst:.1e} of the largest logit")
    good = not differing and worst < TOLERANCE and ids == list(head.wants().layers)
    print("equal" if good else "NOT EQUAL")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
