"""Anthropic's Messages API over the same turns as chat completions.

`request` turns a request into a chat completion, `reply` and `stream` put a reply into Anthropic's
format, `errors` a refusal; all are pure. `routes` has the routes.
"""
