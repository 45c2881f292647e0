#!/bin/sh
# The tests on a GPU, then all tables, within 20 minutes: for a machine with one NVIDIA GPU, a driver
# for CUDA 13, Python 3.11 or newer, and pip. Run it in the repository's root:
#
#     sh benchmarks/gpu/suite.sh [folder of the virtual environment]
#
# An MPI that takes pointers to the GPU's memory is used where OPAL_PREFIX and MPI4PY_LIBMPI name one,
# with its mpiexec first on PATH (docs/gpu.md); else messages are staged. INSTALLED=1 uses the python
# that is there, and installs nothing.
set -u
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root" || exit
if [ "${INSTALLED:-0}" = 0 ]; then
    venv=${1:-/tmp/linop-gpu}
    python3 -m venv "$venv" && . "$venv/bin/activate" || exit
    mpi=mpi
    if [ -n "${MPI4PY_LIBMPI:-}" ]; then  # the MPI is there; its wheel would hide it
        pip install -q mpi4py && mpi=cupy || exit
    fi
    pip install -q -c .ci/constraints.txt ".[$mpi,cupy,torch,test]" typer rich || exit
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1 OMP_NUM_THREADS=1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe OMPI_MCA_osc=^ucx
out=${OUT:-benchmarks/results}
mkdir -p "$out"
date -u
nvidia-smi || true
python -m linop doctor
timeout 600 python -m pytest -q -n 6 --dist worksteal -p linop.testing.plugin -m gpu adjoint_tests >"$out/gpu_tests.txt" 2>&1
tests=$?
tail -30 "$out/gpu_tests.txt"
timeout 540 python benchmarks/gpu/run.py --seconds 1 --output "$out"
tables=$?
date -u
exit $((tests | tables))
