"""The card of a data set: what the library reads (YAML) and what people read."""

from __future__ import annotations

from opd.export.request import Dataset

_HEAD = """\
---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*.parquet
task_categories:
- text-generation
tags:
- conversational
- tool-use
- {tag}
---

# {title}

{rows} rows, written by `opd records export --dataset {kind}` from the records of one run.

```python
from datasets import load_dataset

rows = load_dataset("THIS_FOLDER", split="train")
```

"""
_SFT = """\
`messages` is a conversation in OpenAI's shape that ends with an answer of the agent. It is included
because the conversation went on after it, a vote of the judge says that the answer needed no
correction, no vote says that it did, and nobody corrected it or gave it a score below the middle.
Train on the last message only: earlier answers in it were not chosen.
"""
_TAUGHT = """\
`messages` is a conversation in OpenAI's shape that ends with an answer of the run's judge, a model
that returns text. It read the prompt with the hint that the agent's own answer had earned; the hint
is not in `messages`. Nobody has checked the answers. Train on the last message only.
"""
_PREFERENCE = """\
`prompt`, `chosen` and `rejected` are messages in OpenAI's shape; the last two contain one message.
`source` says where the preference is from: `correction`, somebody's corrected answer against the
answer that was given; or `scores`, the answer to a prompt with the highest score against the one
with the lowest, which is from the turn `rejected_turn_id`.
"""
_FOOT = """
`tools` is JSON text, or null without tools; so are the `arguments` of a call. `turn_id` and
`session_id` name the turn in the records; `data_source` is where its task comes from, or null if
nobody said. Whoever asks to be forgotten there must be forgotten here too: find the rows by
`session_id`{and_more}.
"""
_KINDS: dict[Dataset, tuple[str, str]] = {
    "sft": ("Answers that needed no correction", _SFT),
    "taught": ("Answers that a text model gave with the hint in view", _TAUGHT),
    "preference": ("Preferences between answers", _PREFERENCE),
}


def card(kind: Dataset, rows: int) -> str:
    """The text of README.md."""
    title, text = _KINDS[kind]
    tag = "preference" if kind == "preference" else "sft"
    head = _HEAD.format(title=title, rows=rows, kind=kind, tag=tag)
    foot = _FOOT.format(and_more=" and `rejected_session_id`" if kind == "preference" else "")
    return head + text + foot
