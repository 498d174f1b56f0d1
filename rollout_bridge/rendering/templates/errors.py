"""What chat templates and tokenizers raise on messages that they cannot show, as one error."""

from __future__ import annotations

from typing import Any

_LONGEST = 300


class Unrenderable(ValueError):
    """Messages that the template cannot show, in words for whoever sent them."""


class TemplateErrors:
    """Turns what templates and renderers raise on messages they cannot show into ValueError."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        from jinja2 import TemplateError

        if isinstance(error, TemplateError):
            # What a template says about a request ("roles must alternate") is for its sender.
            said = (str(error).strip() or type(error).__name__).split("\n")[0][:_LONGEST]
            raise Unrenderable(f"the chat template cannot render these messages: {said}") from error
        raised = KeyError | TypeError | AttributeError | RecursionError
        if isinstance(error, raised):
            raise ValueError(f"the chat template cannot render these messages: {error}") from error
        # A panic of tokenizers (written in Rust) is not an Exception and has no public type.
        if type(error).__name__ == "PanicException":
            raise ValueError(f"the tokenizer cannot split these messages: {error}") from error
