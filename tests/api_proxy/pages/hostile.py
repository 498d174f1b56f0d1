"""Texts that try to run in a page, to leave their place in it, or to break it."""

from __future__ import annotations

HOSTILE = (
    "<script>alert(1)</script>",
    "</textarea></title></script><img src=x onerror=alert(1)>",
    "\"' onmouseover='alert(1)' x=\"",
    "{{ 7 * 7 }}{% raw %}",
    "javascript:alert(1)//\u202eevil\u2066\u200b\x00\x1b[31m",
    "&lt;b&gt;<!-- ]]> -->",
)


def assert_harmless(page: str) -> None:
    """Nothing of these texts stands in a page as anything but text."""
    for part in (
        "<script>",
        "<img",
        "</textarea></title>",
        "' onmouseover",
        "<!-- ]",
        "\u202e",
        "\x1b",
    ):
        assert part not in page, part
