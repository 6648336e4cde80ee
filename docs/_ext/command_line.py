"""``.. command:: train``: what ``liger train --help`` says, as tables, from the parser of the
command itself. Blocks of commands are highlighted, and wrap, as a shell's."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock


class _Found(Exception):
    """Carries the parser out of the command."""


def parser_of(words: str) -> argparse.ArgumentParser:
    """The parser that a command makes: the command runs until it would parse."""
    from liger_kernel import cli

    def found(self: argparse.ArgumentParser, *_: Any, **__: Any) -> Any:
        if self.prog == "liger":
            return original(self, *_, **__)
        raise _Found(self)

    original = argparse.ArgumentParser.parse_args
    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", found),
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", found),
    ):
        try:
            first, *rest = words.split()
            cli.run(words, []) if words in cli.MODULES else cli.run(first, rest)
        except _Found as parser:
            return parser.args[0]
    raise LookupError(f"liger {words} parses no arguments")


def lines(words: str) -> Iterator[str]:
    """A command as reStructuredText: its usage, and a list of arguments for each group."""
    parser = parser_of(words)
    yield from [*parser.description.splitlines(), ""] if parser.description else []
    for group in parser._action_groups:
        actions = [
            action
            for action in group._group_actions
            if action.help is not argparse.SUPPRESS and "--help" not in action.option_strings
        ]
        if not actions:
            continue
        yield from [f".. rubric:: {(group.title or '').capitalize()}", ""]
        for action in actions:
            yield from _argument(parser, action)


def _argument(parser: argparse.ArgumentParser, action: argparse.Action) -> Iterator[str]:
    if isinstance(action, argparse._SubParsersAction):
        for choice in action._choices_actions:
            yield from [f"``{choice.dest}``", f"   {choice.help or ''}", ""]
        return
    names = ", ".join(action.option_strings) or action.metavar or action.dest
    value = (
        ""
        if action.nargs == 0 or not action.option_strings
        else f" {action.metavar or (_choices(action) or action.dest.upper())}"
    )
    yield f"``{names if isinstance(names, str) else ' '.join(names)}{value}``"
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    yield from [f"   {_escaped(text)}", ""]


def _choices(action: argparse.Action) -> str:
    return "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""


def _escaped(text: str) -> str:
    return " ".join("".join(f"\\{c}" if c in "*|`\\" else c for c in text).split())


SHELL = re.compile(r"([A-Z_]+=\S+ )*(liger|pip|make|git|python|pytest|docker|helm|kubectl|curl|torchrun|sbatch) ")


def setup(app: Any) -> dict[str, Any]:
    from docutils import nodes
    from docutils.statemachine import StringList
    from sphinx.util.docutils import SphinxDirective
    from sphinx.util.parsing import nested_parse_to_nodes

    def of_shell(app: Any, document: Any) -> None:
        for block in document.findall(nodes.literal_block):
            if SHELL.match(block.astext()):
                block["language"] = "bash"

    class Command(SphinxDirective):
        required_arguments = 1
        final_argument_whitespace = True

        def run(self) -> list[Any]:
            return nested_parse_to_nodes(self.state, StringList(list(lines(self.arguments[0])), "command line"))

    app.add_directive("command", Command)
    app.connect("doctree-read", of_shell)
    return {"parallel_read_safe": True}
