#!/usr/bin/env bash
# run_tests.sh: run each argument (a command that ends with `N passed, N failed`), show the failures,
# and end with the sum. A command that dies without that line counts as one failure.
set -u
passed=0 failed=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for command in "$@"; do
    start=$(date +%s)
    $command >"$log" 2>&1
    code=$?
    read -r p f < <(sed -nE 's/^([0-9]+) passed, ([0-9]+) failed$/\1 \2/p' "$log" | tail -n 1)
    if [ -z "${p:-}" ]; then
        p=0 f=1
        tail -n 20 "$log"
        echo "FAIL $command: ended with code $code before its summary"
    elif [ "$code" -ne 0 ] && [ "$f" -eq 0 ]; then
        f=1
        echo "FAIL $command: exit code $code although nothing failed"
    fi
    [ "$f" -gt 0 ] && grep -E '^FAIL' "$log" | head -n 40
    grep -E '^SKIP' "$log"
    printf '%-40s %5d passed %3d failed %4ds\n' "$command" "$p" "$f" $(($(date +%s) - start))
    passed=$((passed + p)) failed=$((failed + f))
    unset p f
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
