#!/usr/bin/env bash
# Runs the numerical tests with the vector instructions of three processors: this one, one with AVX2, one with SSE only.
# It needs x86-64 with AVX2. Arguments name other tests, and PROCESSORS other settings than "native avx2 sse".
set -euo pipefail
cd "$(dirname "$0")/.."
tests=("$@")
[ ${#tests[@]} -gt 0 ] || tests=(
  tests/unit/test_scoring_*.py tests/unit/test_metrics_*.py tests/unit/test_compress_layers.py
  tests/unit/test_compress_experts.py tests/unit/test_swaps.py tests/unit/test_diagnosis_numbers.py tests/golden
)

# numba (an empty list of features: those of the named CPU), torch, its MKL and oneDNN, numpy and its OpenBLAS.
avx512=(AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL)
native=()
avx2=(
  NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES= ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2
  ONEDNN_MAX_CPU_ISA=AVX2 OPENBLAS_CORETYPE=Haswell "NPY_DISABLE_CPU_FEATURES=${avx512[*]}"
)
sse=(
  NUMBA_CPU_NAME=generic NUMBA_CPU_FEATURES= ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2
  ONEDNN_MAX_CPU_ISA=SSE41 OPENBLAS_CORETYPE=Nehalem "NPY_DISABLE_CPU_FEATURES=AVX F16C FMA3 AVX2 ${avx512[*]}"
)

failed=()
for setting in ${PROCESSORS:-native avx2 sse}; do
  declare -n variables=$setting
  echo "== $setting ${variables[*]}"
  env "${variables[@]}" python -m pytest -q -n 2 "${tests[@]}" || failed+=("$setting")
done
[ ${#failed[@]} -eq 0 ] || { echo "failed with: ${failed[*]}" >&2; exit 1; }
