"""OpenAI's Responses API over the same turns as chat completions.

`request` turns a request into a chat completion (`items` turns input items into messages and back),
`reply` and `stream` put a reply into this API's format; all are pure. `stored` reads back what was
sent earlier, `routes` has the routes.
"""
