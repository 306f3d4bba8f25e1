#!/bin/bash
# .gpu-attention.sh DIR [OUT]: checks, then tables, of the attention ladders built in DIR, in under
# 90 s on an H200; everything printed is kept in OUT (default: $OUT, else .). Uncommitted.
dir=${1:?directory of binaries} out=${2:-${OUT:-.}} failed=0
mkdir -p "$out"
start=$(date +%s)
step() # step SECONDS NAME BINARY ARGUMENTS: run, keep, print the end
{
    local limit=$1 name=$2 rc
    shift 2
    timeout "$limit" "$@" >"$out/$name.txt" 2>&1
    rc=$?
    [ $rc = 0 ] || failed=1
    echo "== $name: exit $rc, $(($(date +%s) - start)) s so far"
    grep -E "FAILED|error|differs|bound" "$out/$name.txt" | head -n 12
    grep -vE "FAILED|error|differs|bound|$(printf '\t')" "$out/$name.txt" | tail -n "${LINES_KEPT:-3}"
}
for f in attention_forward attention_backward linear_attention; do
    step 60 $f.bf16.check "$dir/$f" --check-only
    step 60 $f.fp32.check "$dir/${f}_fp32" --check-only
done
LINES_KEPT=60
step 40 attention_forward.bf16.table "$dir/attention_forward" --time-only --csv --reps 15
step 60 attention_backward.bf16.table "$dir/attention_backward" --time-only --csv --reps 15
step 60 linear_attention.bf16.table "$dir/linear_attention" --time-only --csv --reps 15
grep -hP "\t" "$out"/*.table.txt >"$out/attention.tsv" 2>/dev/null # rows for dev/results/attention.tsv
echo "total $(($(date +%s) - start)) s, failed=$failed"
exit $failed
