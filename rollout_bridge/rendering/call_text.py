"""A tool call written as JSON, read while it is being written.

Most families write `{"name": ..., "arguments": {...}}` between markers. `CallReader` returns the
part of such a block that is certain so far. The whole block is parsed (`rendering`) with the same
reader, so that it agrees with what was streamed. Arguments are the text that the policy wrote:
re-serialising them would change them (spaces, escapes) after they were sent.

Pure; it knows neither tokens nor markers.
"""

from __future__ import annotations

import re

_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"arguments"\s*:\s*(?=\{)', re.DOTALL
)
_LONGEST_HEAD = 4096
"""Characters within which name and arguments must begin, so that a block of another form is not
searched again for each token.
"""
_SPECIAL = re.compile(r'[{}\[\]"\\]')


class CallReader:
    """One block, fed with its text as it comes.

    `name` is None until it is certain; then `push` returns arguments. A block of another form never
    gets a name here.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_complete = False
        self._head = ""
        self._scan = _ObjectScan()
        self._held = ""

    def push(self, text: str) -> str:
        """Add text; returns the part of the arguments that is now certain.

        Whitespace waits for what follows it: at the end of a cut-off block it is not an argument.
        """
        if self.name is None:
            if len(self._head) > _LONGEST_HEAD:
                return ""
            self._head += text
            found = _HEAD.match(self._head)
            if found is None:
                return ""
            self.name = found["name"]
            text, self._head = self._head[found.end() :], ""
        if self.is_complete:
            return ""
        end = self._scan.end(text)
        self.is_complete = end is not None
        text = self._held + text[:end]
        certain = text if self.is_complete else text.rstrip()
        self._held = text[len(certain) :]
        return certain


def read_call(block: str) -> tuple[str, str] | None:
    """(name, arguments as written) of a whole block, None if it has another form."""
    reader = CallReader()
    arguments = reader.push(block)
    return None if reader.name is None else (reader.name, arguments)


class _ObjectScan:
    """Finds the end of the JSON object that begins with the first text."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = False
        self._is_escaped = False

    def end(self, text: str) -> int | None:
        """The position in `text` after the object's last brace, None if it goes on."""
        position = 0
        while position < len(text):
            if self._is_escaped:
                self._is_escaped = False
                position += 1
                continue
            found = _SPECIAL.search(text, position)
            if found is None:
                return None
            position = found.end()
            self._take(found.group())
            if self._depth == 0 and not self._is_string:
                return position
        return None

    def _take(self, character: str) -> None:
        if character == "\\":
            self._is_escaped = self._is_string
        elif character == '"':
            self._is_string = not self._is_string
        elif not self._is_string:
            self._depth += 1 if character in "{[" else -1
