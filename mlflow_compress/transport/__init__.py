"""The one way in which this package asks an endpoint: asynchronous calls, with retries, rate limits and a budget.

`json_process` talks with a process on this machine.
"""
