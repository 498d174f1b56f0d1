"""OpenAI's Responses API over the same turns as chat completions.

`request` says what a request means as a chat completion (`items` turns input items into messages
and back), `reply` and `stream` how a reply is worded; all are pure. `stored` reads back what was
sent earlier, `routes` is the door.
"""
