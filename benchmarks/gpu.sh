#!/bin/sh
# GPU tests and tables, unattended: sh benchmarks/gpu.sh [SECONDS, 400 if not given]
#
# What matters most comes first, and every part leaves what it has when time is up:
#   1. rankgrad bench reach   -> $OUT/reach.md, written anew after every line, with goals met and missed
#   2. all tests marked gpu   -> $OUT/gpu_tests.txt; eight processes, so that kernels compile side by side
#   3. rankgrad bench         -> $OUT/bench.md, the tables with the baselines, in the time that is left
# Exit status: 0 if nothing failed. Needs python3 with torch, Triton, pytest and the packages of the extra `bench`;
# packages that are not installed there can be given by PYTHONPATH.
set -u
end=$(( $(date +%s) + ${1:-400} ))
left() { echo $(( end - $(date +%s) )); }
OUT=${OUT:-build/gpu}
parts=$(mktemp -d)
mkdir -p "$OUT"
export PYTHONPATH="src:tests:${PYTHONPATH:-}" OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-/tmp/rankgrad-triton}"
failed=0

echo "== bench reach"
timeout 170 python3 -m rankgrad bench reach --device cuda --markdown "$OUT/reach.md" > "$OUT/reach.txt" 2>&1 || failed=1
grep -E "MISSED|differs|failed" "$OUT/reach.txt"
tail -n 1 "$OUT/reach.md"

echo "== tests, $(left) s left"
files=$(grep -rl --include="test_*.py" "pytest\.mark\.gpu" tests)
python3 -m pytest -q --collect-only -m gpu -p no:cacheprovider $files 2> /dev/null | grep "::" > "$parts/ids"
split -n r/8 "$parts/ids" "$parts/part."
limit=$(( $(left) - 60 ))
for part in "$parts"/part.*; do
    timeout "$limit" python3 -c "import sys, pytest
options = ['-v', '-m', 'gpu', '-p', 'no:cacheprovider', '--tb=short', '--no-header']
sys.exit(pytest.main([*options, *open(sys.argv[1]).read().splitlines()]))" "$part" > "$part.log" 2>&1 &
done
wait
cat "$parts"/part.*.log > "$OUT/gpu_tests.txt"
asked=$(wc -l < "$parts/ids")
passed=$(grep -cE "::.* PASSED" "$OUT/gpu_tests.txt")
echo "$passed of $asked tests passed in 8 processes of at most $limit s; those that did not:"
grep -hE "::.* (FAILED|ERROR|SKIPPED)|^E  " "$OUT/gpu_tests.txt" | head -n 60
[ "$passed" = "$asked" ] || failed=1

if [ "$(left)" -gt 30 ]; then
    echo "== bench, $(left) s left"
    timeout "$(left)" python3 -m rankgrad bench --device cuda --markdown "$OUT/bench.md" > "$OUT/bench.txt" 2>&1 || failed=1
    tail -n 5 "$OUT/bench.txt"
fi
exit $failed
