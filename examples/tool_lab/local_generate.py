"""Generation in this process: a folder's model, batched, for evaluations without an engine.

Also a command: `python -m examples.tool_lab.local_generate --model DIR --n 256` prints the
evaluation's table.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from examples.tool_lab.cases import GenerationRequest, Message
from examples.tool_lab.evaluate import GROUPS, evaluate, table
from examples.tool_lab.preferences import TRAINABLE_KINDS
from rollout_bridge.config import RendererConfig
from rollout_bridge.embedded.model.products import compute_fast
from rollout_bridge.rendering.rendering import Rendering

RENDERER = RendererConfig(name="qwen3", enable_thinking=False)


class LocalGenerator:
    """A model and its rendering; called with requests and a temperature, it returns messages."""

    def __init__(
        self,
        model: Any,
        rendering: Rendering,
        *,
        batch_size: int = 64,
        max_new_tokens: int = 64,
    ) -> None:
        self.model = model
        self.rendering = rendering
        self._batch_size = batch_size
        self._max_new_tokens = max_new_tokens

    @classmethod
    def load(cls, path: str, **settings: Any) -> LocalGenerator:
        """Model (as float32) and tokenizer of a local folder."""
        # A progress bar for a model that loads in a moment only clutters the output.
        transformers_logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        compute_fast(model)
        return cls(model, Rendering.load(path, RENDERER), **settings)

    def __call__(self, requests: Sequence[GenerationRequest], temperature: float) -> list[Message]:
        """One response for each request, in order; prompts of similar length share a batch."""
        prompts = [
            self.rendering.prompt_ids(request.messages, request.tools) for request in requests
        ]
        return [self.message(ids) for ids in self.sample_ids(prompts, temperature)]

    def sample_ids(self, prompts: Sequence[np.ndarray], temperature: float) -> list[np.ndarray]:
        """One response for each prompt, in order, as ids with the stop token."""
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        responses: list[np.ndarray] = [np.zeros(0, dtype=np.int32) for _ in prompts]
        for start in range(0, len(order), self._batch_size):
            chunk = order[start : start + self._batch_size]
            sampled = self._sample([prompts[index] for index in chunk], temperature)
            for index, ids in zip(chunk, sampled, strict=True):
                responses[index] = ids
        return responses

    @torch.inference_mode()
    def _sample(self, prompts: list[np.ndarray], temperature: float) -> list[np.ndarray]:
        stop_ids = list(self.rendering.stop_token_ids)
        pad_id = stop_ids[-1]
        longest = max(len(prompt) for prompt in prompts)
        ids_BT = torch.full((len(prompts), longest), pad_id)
        mask_BT = torch.zeros((len(prompts), longest), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids_BT[row, longest - len(prompt) :] = torch.from_numpy(prompt).long()
            mask_BT[row, longest - len(prompt) :] = 1
        out_BT = self.model.generate(
            input_ids=ids_BT,
            attention_mask=mask_BT,
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=self._max_new_tokens,
            eos_token_id=stop_ids,
            pad_token_id=pad_id,
        )
        sampled = []
        for row in out_BT[:, longest:].tolist():
            ends = [position for position, token in enumerate(row) if token in stop_ids]
            sampled.append(np.asarray(row[: ends[0] + 1] if ends else row, dtype=np.int32))
        return sampled

    def message(self, response_ids: np.ndarray) -> Message:
        """Sampled ids as an assistant message in OpenAI's shape; nameless calls stay text."""
        reply = self.rendering.parse(response_ids)
        content = reply.content
        calls = []
        for number, call in enumerate(reply.tool_calls):
            if not call.name:
                content += call.raw
                continue
            function = {"name": call.name, "arguments": call.arguments_json}
            calls.append({"id": f"call_{number}", "type": "function", "function": function})
        message: Message = {"role": "assistant", "content": content}
        return {**message, "tool_calls": calls} if calls else message


def main() -> None:
    """Evaluate a folder and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="examples/tool_lab/model")
    parser.add_argument("--n", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--groups", nargs="*", default=list(GROUPS))
    parser.add_argument("--kinds", nargs="*", default=list(TRAINABLE_KINDS))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    generator = LocalGenerator.load(arguments.model)
    started = time.monotonic()
    rates = asyncio.run(
        evaluate(generator, arguments.n, arguments.seed, arguments.groups, arguments.kinds)
    )
    print(table(rates))
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
