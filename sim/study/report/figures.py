"""The plots as parts of the page."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from sim.study.plots.style import write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["CAPTIONS", "MOST_SVG_BYTES", "figures_html"]

MOST_SVG_BYTES = 250_000
"""A larger vector picture is taken along as pixels: one with a mark a request may take megabytes."""

CAPTIONS = {
    "slots": "What the slots of the pool hold over time.",
    "block_liveness": "Allocated blocks over time, by the share of their slots that is live.",
    "retained_blocks": "KV blocks that a request holds while it decodes.",
    "retained_blocks_cdf": "KV blocks that a request holds while it decodes: share of requests by how many.",
    "retained_blocks_paired": "The same request under naive reclamation: how much less it holds.",
    "concurrency": "Requests that run at the same time.",
    "latency": "Latency of requests.",
    "pool": "The pool's blocks just before and just behind the repack that freed most.",
    "block_map": "The slots of the pool just before and just behind the repack that freed most.",
    "fragmentation": "Fragmentation F of allocated blocks, mean over time.",
    "throughput": "Finished requests per second.",
}
"""What a picture shows; one that is not listed has its name under it."""


def figures_html(figures: Iterable[tuple[str, Figure]]) -> str:
    """Return each picture with its caption: vectors where they are small, pixels otherwise."""
    parts = []
    for name, figure in figures:
        kind, data = "svg+xml", _bytes(figure, "svg")
        if len(data) > MOST_SVG_BYTES:
            kind, data = "png", _bytes(figure, "png")
        title = figure.get_suptitle() or next((axes.get_title("left") for axes in figure.axes), "")
        caption = CAPTIONS.get(name, f"{name.replace('_', ' ')}.")
        source = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
        parts.append(
            f'<figure><img src="{source}" alt="{escape(f"{caption} {title}".strip())}" loading="lazy">'
            f"<figcaption>{escape(caption)}</figcaption></figure>"
        )
    return "\n".join(parts)


def _bytes(figure: Figure, file_format: str) -> bytes:
    buffer = io.BytesIO()
    write(figure, buffer, file_format)
    return buffer.getvalue()
