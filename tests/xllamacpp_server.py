"""llama.cpp's own HTTP server by the package xllamacpp, for tests: ``PYTHON xllamacpp_server.py FILE ALIAS PORT``."""

import signal
import sys

import xllamacpp

file, alias, port = sys.argv[1:]
params = xllamacpp.CommonParams()
params.model.path = file
params.model_alias = {alias}
params.hostnames = ["127.0.0.1"]
params.port = int(port)
params.n_ctx, params.n_parallel = 512, 1
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(params)
signal.pause()  # it serves in a thread of its own
