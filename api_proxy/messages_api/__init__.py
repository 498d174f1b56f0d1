"""Anthropic's Messages API over the same turns as chat completions.

`request` says what a request means as a chat completion, `reply` and `stream` how a reply is
worded, `errors` how a refusal is; all are pure. `routes` is the door.
"""
