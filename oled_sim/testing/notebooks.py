"""Notebooks without Jupyter: their cells are run in order, and the last value of each is kept.

Enough for notebooks that load results and show figures and tables. IPython's own commands
(``%``, ``!``) are not understood.
"""

from __future__ import annotations

import ast
import base64
import json
from contextlib import chdir
from pathlib import Path
from typing import Any

from oled_sim.trace.files import write_atomic


class CellError(Exception):
    """A cell raised: the message says which one, and what."""


def run_notebook(path: Path) -> dict[str, Any]:
    """Run all code cells in the notebook's folder; return the notebook with their outputs.

    The outputs are those of the last expression of each cell, in the forms that Jupyter would keep:
    PNG, HTML and text. What was in the file is left alone.

    Raises:
        CellError: a cell raised.
    """
    notebook = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    code = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    with chdir(path.parent):
        for count, cell in enumerate(code, 1):
            source = "".join(cell["source"])
            try:
                value = _run(source, f"{path.name}, cell {count}", names)
            except Exception as error:
                raise CellError(f"{path.name}, cell {count}: {error!r}\n{source}") from error
            cell["execution_count"] = count
            cell["outputs"] = [] if value is None else [_output(value, count)]
    return notebook


def write_notebook(path: Path, notebook: dict[str, Any]) -> None:
    """Write a notebook; equal notebooks give equal bytes."""
    write_atomic(path, (json.dumps(notebook, indent=1, ensure_ascii=False) + "\n").encode())


def _run(source: str, name: str, names: dict[str, Any]) -> Any:
    """Run a cell; return the value of its last line if that is an expression."""
    tree = ast.parse(source, name)
    *_, last = tree.body or [None]
    if not isinstance(last, ast.Expr):
        exec(compile(tree, name, "exec"), names)
        return None
    tree.body.pop()
    exec(compile(tree, name, "exec"), names)
    return eval(compile(ast.Expression(last.value), name, "eval"), names)


def _output(value: Any, count: int) -> dict[str, Any]:
    data: dict[str, Any] = {}
    if hasattr(value, "_repr_png_"):
        data["image/png"] = base64.b64encode(value._repr_png_()).decode()
    if hasattr(value, "_repr_html_"):
        data["text/html"] = value._repr_html_().splitlines(keepends=True)
    data["text/plain"] = repr(value).splitlines(keepends=True)
    return {
        "output_type": "execute_result",
        "execution_count": count,
        "metadata": {},
        "data": data,
    }
