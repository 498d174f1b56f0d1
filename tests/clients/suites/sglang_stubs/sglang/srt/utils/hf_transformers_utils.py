"""The tokenizer of the model that is served, whatever model a test names."""

import os

from transformers import AutoTokenizer


def get_tokenizer(_name: str):
    return AutoTokenizer.from_pretrained(os.environ["SERVED_MODEL"])
