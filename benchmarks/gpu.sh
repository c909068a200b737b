#!/usr/bin/env bash
# Makes the tables of docs/performance.md that are of a GPU, with nothing else on the device:
#
#     PYTHON=.venv/bin/python bash benchmarks/gpu.sh OUT [STEP …]
#
# PYTHON is python3 where nothing else is said; it needs torch for CUDA, and pytest with hypothesis for the
# tests. What each step prints goes to OUT/STEP.txt and its figures to OUT/STEP.json; a step that fails does
# not keep the others from running. Without names all are made, in this order, in about 15 minutes on an H200.
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH=src PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
out=${1:?where to write, e.g. build/bench/gpu}
shift
mkdir -p "$out"

engines() { "$python" benchmarks/engines.py --device cuda --out "$out/$step.json" "$@"; }
phases() { "$python" benchmarks/phases.py --only lenet-10-64 lenet-100-16 --out "$out/$step.json" "$@"; }

run() {
    case $step in
        # By name: files beside them need packages that a machine with a GPU may not have.
        tests) "$python" -m pytest -m gpu -q tests/invariances/test_gpu.py tests/invariances/test_drift.py \
            tests/unit/test_aggregate.py tests/unit/test_minnorm.py ;;
        phases) phases ;;
        phases-tf32) phases --precision tf32 ;;
        lenet) engines --only lenet-10-64 lenet-100-16 --engines plain compiled auto --repeats 5 ;;
        growth) engines --growth --engines vectorized ;;
        resnet) engines --only resnet --engines plain auto ;;
        resnet-tf32) engines --only resnet --precision tf32 --engines plain compiled ;;
        convolutions) "$python" benchmarks/convolutions.py --out "$out/$step.json" ;;
        small) engines --only lenet-10-16 lenet-10-64 lenet-10-256 mlp-16 mlp-256 transformer --repeats 5 \
            --engines plain sequential vmap vectorized compiled auto jax ;;
        large) engines --only lenet-100-16 lenet-100-64 lenet-100-256 --repeats 3 \
            --engines plain vmap vectorized compiled auto jax ;;
        precision) "$python" benchmarks/precision.py --device cuda --rounds 100 --seeds 2 --out "$out/$step.json" ;;
        *) echo "no step \`$step\`" && return 2 ;;
    esac
}

[ $# -gt 0 ] || set -- tests phases phases-tf32 lenet growth resnet resnet-tf32 convolutions small large precision
failed=0
for step in "$@"; do
    started=$SECONDS
    if run > "$out/$step.txt" 2>&1; then how=done; else how=FAILED failed=1; fi
    echo "$step: $how in $((SECONDS - started)) s, $out/$step.txt"
    [ "$how" = FAILED ] && tail -n 5 "$out/$step.txt"
done
exit $failed
