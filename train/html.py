"""One static HTML file that needs nothing but itself: shell, escaping, embedded data.

Everything that a document, a model or a person wrote passes through `text` (into markup) or `data_block`
(into a JSON island that the page's script reads with textContent), so that no input can become markup or
script. The page says so itself: its content policy allows this file's own script, by hash, and no request
to anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from statelm_jax.errors import UserError

_UNSAFE_IN_JSON = re.compile("[<>&\u2028\u2029\ud800-\udfff]")
"""What could end a script element early (`</script>`, `<!--`), and what UTF-8 cannot hold (lone surrogates)."""


def text(value: object) -> str:
    """`str(value)` as HTML text, safe in element content and in quoted attributes."""
    return html.escape(str(value).encode("utf-8", "replace").decode("utf-8"), quote=True)


def data_block(element_id: str, value: Any) -> str:
    """`value` as a JSON island; the script finds it by `element_id`. Raises ValueError for NaN and infinities."""
    raw = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    safe = _UNSAFE_IN_JSON.sub(lambda match: f"\\u{ord(match.group()):04x}", raw)
    return f'<script type="application/json" id="{text(element_id)}">{safe}</script>'


def image(png: bytes, alt: str, css_class: str = "") -> str:
    """A PNG as an inline image."""
    encoded = base64.b64encode(png).decode("ascii")
    return f'<img class="{text(css_class)}" alt="{text(alt)}" src="data:image/png;base64,{encoded}">'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """A table; cells are markup already (see `text`), `head` and `caption` are plain text."""
    cells = "".join(f'<th scope="col">{text(name)}</th>' for name in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    title = f"<caption>{text(caption)}</caption>" if caption else ""
    return f'<div class="scroll"><table>{title}<thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'


def page(title: str, body: str) -> str:
    """The whole file around `body` (markup), with the one style sheet and the one script inlined."""
    style, script = _asset("style.css"), _asset("viewer.js")
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{body}\n"
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def write(path: Path, content: str) -> None:
    """Write `content` at `path`, whole or not at all. `UserError` when the place cannot be written."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(content, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror or error}; give another file with -o") from None


def _asset(name: str) -> str:
    return resources.files("statelm_jax.train").joinpath("web", name).read_text(encoding="utf-8")
