"""The one way in which this package asks an endpoint: asynchronous calls, with retries, rate limits and a budget.

`client.Transport` is what callers open. The other modules are its parts: `endpoint` (address and key), `replies` and
`spending`; `addresses` keeps passwords out of what is recorded.
"""
