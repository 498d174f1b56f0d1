"""The few names of sglang that its own tests of the HTTP server take from it.

In front of a checkout's `python/sglang` on the module path: what is not here comes from there.
Nothing here starts a server: the tests talk to the endpoint that is under test.
"""
