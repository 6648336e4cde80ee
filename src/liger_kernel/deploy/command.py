"""``liger deploy``: a job's files, and the job on a cluster."""

from __future__ import annotations

import sys

from liger_kernel.deploy.job import Job
from liger_kernel.deploy.kubectl import Cluster
from liger_kernel.deploy.render import FORMS, render, write
from liger_kernel.train.mistakes import Parser, UserError, writable

COMMANDS = {
    "render": "print or write a job's files",
    "submit": "kubectl apply of the plain YAML",
    "status": "the state of the run and its pods, and its last line",
    "logs": "what the trainer prints on all nodes",
    "delete": "stop the run, which saves a checkpoint, and delete its objects",
}


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="liger deploy",
        description="Render a training job for Kubernetes, submit it, and look after it (docs/guides/clusters.md).",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    check = "let kubectl check and change nothing; server asks the cluster's own checks"
    for name, text in COMMANDS.items():
        add = commands.add_parser(name, help=text).add_argument
        add("job", help="YAML or JSON file of a job")
        if name != "render":
            add("--context", help="the context of kubectl's configuration to use")
        if name in ("submit", "delete"):
            add("--dry-run", choices=("client", "server"), help=check)
    rendering, reading = commands.choices["render"], commands.choices["logs"]
    forms = (
        "plain YAML, a folder for kubectl -k, a Helm chart, the config of liger train, "
        "Prometheus rules, or a Grafana dashboard"
    )
    rendering.add_argument("--as", dest="form", choices=FORMS, default="yaml", help=forms)
    rendering.add_argument("--to", metavar="DIR", help="write below this folder (default: print)")
    reading.add_argument("--container", help="another container, such as warm-kernels")
    reading.add_argument("-f", "--follow", action="store_true", help="go on until the pods end")
    reading.add_argument("-p", "--previous", action="store_true", help="of the container before its restart")
    reading.add_argument("--tail", default=-1, help="only the last N lines of each pod (default: all)")
    a = parser.parse_args(argv)
    job = Job.load(a.job)
    if a.command != "render":
        if a.command == "submit":
            print(*job.warnings, sep="", end="", file=sys.stderr, flush=True)
        options = {name: value for name, value in vars(a).items() if name not in ("command", "job", "context")}
        return getattr(Cluster(job, a.context), a.command)(**options)
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
