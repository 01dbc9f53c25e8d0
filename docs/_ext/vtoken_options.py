"""Sphinx directive ``vtoken-options``: usage and options of a command, read from the command itself.

Write ``{vtoken-options} search concurrency`` as the directive of a fenced block. Fields of a configuration are not
listed again: their page has them all.
"""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

HEAD = ("option", "default", "meaning")


def find(words: list[str]) -> Any:
    """Return the command that ``vtoken`` and these words name."""
    import typer.main

    from sim.cli import app

    command = typer.main.get_command(app(words[0]))
    for word in words:
        command = command.commands[word]  # type: ignore[attr-defined]
    return command


def rows(words: list[str]) -> tuple[str, list[tuple[str, str, str]], bool]:
    """Return usage, a row for each argument and option, and whether it takes the fields of a configuration."""
    from sim.study.config import SimConfig

    command = find(words)
    usage = ["vtoken", *words, "[OPTIONS]"]
    found = []
    fields = {parameter.name for parameter in command.params} >= {*SimConfig.model_fields}
    for parameter in command.params:
        if fields and parameter.name in SimConfig.model_fields:
            continue
        if parameter.param_type_name == "argument":
            name = parameter.metavar or parameter.name.upper()
            usage.append(name)
        else:
            name = ", ".join((*parameter.opts, *parameter.secondary_opts))
            if not parameter.is_flag:
                name += " " + (parameter.metavar or "VALUE")
        default = parameter.default
        if parameter.required:
            shown = "must be given"
        elif default in (None, False, [], ()) or callable(default):
            shown = ""
        else:
            shown = str(default)
        found.append((name, shown, " ".join((getattr(parameter, "help", None) or "").split())))
    return " ".join(usage), found, fields


class OptionsDirective(SphinxDirective):
    """Usage, and a table of options."""

    required_arguments = 1
    optional_arguments = 3

    def run(self) -> list[nodes.Node]:
        """Return the nodes."""
        usage, found, fields = rows(self.arguments)
        parts: list[nodes.Node] = [nodes.literal_block(usage, usage, language="text")]
        if found:
            parts.append(self._table(found))
        if fields:
            text = nodes.paragraph()
            said = "And every field of a configuration as a flag: {doc}`../configuration`."
            self.state.nested_parse(StringList([said], self.env.docname), self.content_offset, text)
            parts += text.children
        return parts

    def _table(self, found: list[tuple[str, str, str]]) -> nodes.table:
        table = nodes.table(classes=["vtoken-options"])
        group = nodes.tgroup(cols=len(HEAD))
        table += group
        group += [nodes.colspec(colwidth=width) for width in (30, 15, 55)]
        head, body = nodes.thead(), nodes.tbody()
        group += [head, body]
        head += self._row([nodes.paragraph(text=text) for text in HEAD])
        for name, default, meaning in found:
            option = nodes.paragraph("", "", nodes.literal(name, name))
            value = nodes.paragraph("", "", nodes.literal(default, default)) if default else nodes.paragraph()
            body += self._row([option, value, nodes.paragraph(text=meaning)])
        return table

    def _row(self, cells: list[nodes.paragraph]) -> nodes.row:
        row = nodes.row()
        row += [nodes.entry("", cell) for cell in cells]
        return row


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("vtoken-options", OptionsDirective)
    return {"parallel_read_safe": True}
