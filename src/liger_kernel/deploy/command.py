"""``liger deploy``: render a job's files, or apply them to a cluster."""

from __future__ import annotations

import shutil
import subprocess
import sys

from liger_kernel.deploy.job import Job
from liger_kernel.deploy.render import FORMS, render, write
from liger_kernel.train.mistakes import Parser, UserError, writable


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="liger deploy", description="Render a training job for Kubernetes, or submit it (docs/guides/clusters.md)."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    rendering = commands.add_parser("render", help="print or write a job's files")
    submitting = commands.add_parser("submit", help="kubectl apply of the plain YAML")
    for command in (rendering, submitting):
        command.add_argument("job", help="YAML or JSON file of a job")
    forms = (
        "the form: plain YAML (default), a folder for kubectl -k, a Helm chart, the config of liger train, "
        "Prometheus rules, or a Grafana dashboard"
    )
    rendering.add_argument("--as", dest="form", choices=FORMS, default="yaml", help=forms)
    rendering.add_argument("--to", metavar="DIR", help="write below this folder (default: print)")
    submitting.add_argument(
        "--dry-run",
        choices=("client", "server"),
        help="let kubectl check and change nothing; server asks the cluster's own checks",
    )
    submitting.add_argument("--context", help="the context of kubectl's configuration to use")
    a = parser.parse_args(argv)
    job = Job.load(a.job)
    if a.command == "submit":
        print(*job.warnings, sep="", end="", file=sys.stderr, flush=True)
        return submit(job, a.dry_run, a.context)
    files = render(job, a.form)
    if a.to:
        writable(folder=a.to)
        print(*write(files, a.to), sep="\n")
    elif len(files) > 1:
        raise UserError(f"{a.form} is {len(files)} files: give --to DIR")
    else:
        print(*files.values(), sep="", end="")
    if a.form not in ("rules", "dashboard"):
        print(*job.warnings, sep="", end="", file=sys.stderr)
    return 0


def submit(job: Job, dry_run: str | None = None, context: str | None = None) -> int:
    """Run ``kubectl apply`` on the job's plain YAML and return its exit code. Raises
    ``UserError`` if there is no kubectl."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise UserError("submit needs kubectl on the PATH; or apply the files of `liger deploy render` in another way")
    flags = [
        *(["--context", context] if context else []),
        "apply",
        *([f"--dry-run={dry_run}"] if dry_run else []),
        "-f",
        "-",
    ]
    (text,) = render(job, "yaml").values()
    return subprocess.run([kubectl, *flags], input=text, text=True, check=False).returncode
