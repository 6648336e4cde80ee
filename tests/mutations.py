"""Whether tests notice: ten small mistakes in the source, one at a time, each of which must fail
the test that is there for it.

python tests/mutations.py            all of them, about four minutes of two cores; the nightly run does this
python tests/mutations.py rope lora  some of them

A mistake is made in a copy of ``src``, where the test must pass before it. A line that is no longer
found is an error: let the mutation follow the source. A test that does not fail is worse than none.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutation(NamedTuple):
    mistake: str
    file: str  # below src/liger_kernel
    before: str  # once in the file
    after: str
    tests: str  # file, and what -k selects
    select: str


_OPS = "tests/ops/test_ops.py"
MUTATIONS = {
    "cross_entropy": Mutation(
        "the mean also counts ignored labels",
        "ops/losses/cross_entropy_rows.py",
        "        return valid.sum().float()\n",
        "        return torch.ones_like(valid).sum().float()\n",
        _OPS,
        "test_as_accurate_as_pytorch and float32-cross_entropy",
    ),
    "linear_cross_entropy": Mutation(
        "gradients lack the factor of the mean",
        "ops/losses/cross_entropy_rows.py",
        "            factor *= scale\n",
        "            factor *= 1.0\n",
        _OPS,
        "test_as_accurate_as_pytorch and float32-linear_cross_entropy",
    ),
    "rms_norm": Mutation(
        "dx lacks a factor",
        "ops/norms/rms_kernels.py",
        "s_hat * mean[:, None]) * rstd\n",
        "s_hat * mean[:, None])\n",
        _OPS,
        "test_as_accurate_as_pytorch and float32-rms_norm",
    ),
    "glu": Mutation(
        "the gate's gradient lacks up",
        "ops/activations/glu.py",
        "dgate = dy * up * dact\n",
        "dgate = dy * dact\n",
        _OPS,
        "test_as_accurate_as_pytorch and float32-glu",
    ),
    "rope": Mutation(
        "half of the rotation turns the other way",
        "ops/rotary/rope.py",
        "b_cos + a_sin\n",
        "b_cos - a_sin\n",
        _OPS,
        "test_as_accurate_as_pytorch and float32-rope",
    ),
    "lora": Mutation(
        "the gradient through an adapter lacks its scale",
        "ops/projections/adapted.py",
        "beta=0, alpha=adapter.scale, out=dxas[n])",
        "beta=0, out=dxas[n])",
        _OPS,
        "test_as_accurate_as_pytorch and float32 and lora",
    ),
    "grpo": Mutation(
        "the ratio is clipped from above only",
        "ops/losses/grpo_loss.py",
        "return coef.clamp(low, high), coef < low",
        "return coef.clamp(max=high), coef < low",
        "tests/chunked_loss/test_chunked_grpo.py",
        "test_as_accurate_as_the_formula",
    ),
    "dpo": Mutation(
        "the rejected answer has no reference",
        "chunked_loss/dpo_loss.py",
        "c, r = chosen_logps - ref_chosen, rejected_logps - ref_rejected\n",
        "c, r = chosen_logps - ref_chosen, rejected_logps\n",
        "tests/chunked_loss/test_chunked_preference.py",
        "test_as_accurate_as_the_formula",
    ),
    "packing": Mutation(
        "documents of a row go on counting positions",
        "train/token_rows.py",
        "positions = at - torch.where(begins, at, 0).cummax(0).values\n",
        "positions = at\n",
        "tests/train/test_train.py",
        "test_texts_of_a_row_are_documents_by_themselves",
    ),
    "resume": Mutation(
        "a run that goes on reads the first rows again",
        "train/loop.py",
        "            setattr(self, name, state[name])\n",
        '            setattr(self, name, state[name] if name != "position" else 0)\n',
        "tests/train/test_runtime.py",
        "loses_nothing and terminated",
    ),
}


def mutated(folder: Path, mutation: Mutation) -> None:
    """Make the mistake in the copy below ``folder``."""
    path = folder / "liger_kernel" / mutation.file
    text = path.read_text()
    if text.count(mutation.before) != 1:
        raise SystemExit(
            f"{mutation.file} has {text.count(mutation.before)} times what is to be mutated, not once: "
            f"{mutation.before!r}"
        )
    path.write_text(text.replace(mutation.before, mutation.after))


def passes(folder: Path, mutation: Mutation) -> bool:
    """Whether the mutation's test passes with the sources in ``folder``. ``SystemExit`` if there
    was nothing to fail."""
    argv = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", mutation.tests, "-k", mutation.select]
    env = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1) or not (" passed" in done.stdout or " failed" in done.stdout):
        raise SystemExit(f"{mutation.tests} -k {mutation.select!r} did not run:\n{done.stdout}{done.stderr}")
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=", ".join(MUTATIONS))
    names = parser.parse_args().names or list(MUTATIONS)
    if unknown := [name for name in names if name not in MUTATIONS]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(MUTATIONS)}")
    wrong = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in names:
            begin, mutation, folder = time.monotonic(), MUTATIONS[name], Path(temporary) / name
            shutil.copytree(
                ROOT / "src" / "liger_kernel", folder / "liger_kernel", ignore=shutil.ignore_patterns("__pycache__")
            )
            if not passes(folder, mutation):
                said = "FAILS WITHOUT IT"
            else:
                mutated(folder, mutation)
                said = "NOT NOTICED" if passes(folder, mutation) else "noticed"
            print(f"{name:<22} {mutation.mistake:<55} {said} ({time.monotonic() - begin:.0f} s)", flush=True)
            wrong += [name] if said != "noticed" else []
    print("not noticed, or failing without the mistake:", *wrong) if wrong else print("all noticed")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
