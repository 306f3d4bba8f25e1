#!/usr/bin/env bash
# fetch.sh: what the scripts that fetch corpora share; they source it, and go on in the repository's
# root. Each is `bash data/NAME.sh [DIR]`, writes to DIR (default: corpora/, which git ignores) and
# does nothing if what it would make is there. Needed: bash, curl; python3 for all but plain texts.
#
# A download is DIR/FILE.part until it is known to be right, by its SHA-256 or, where none is
# published, by the checksums inside it; then it takes its name. A script that was stopped, or lost
# the network, goes on there when it is run again.
#
#   MIRROR=ADDRESS    take ADDRESS/FILE, not what is published; file:// is fine
#   SHA256=HASH       what the one file of a mirror should have, if it is not the published one
#
# Exit codes: 0 there it is, 2 usage, 3 files, network, or data that are not what they should be.
set -u
caller=$PWD
CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 3

# fail CODE TEXT [HINT]: an error line, a hint, and the end
fail() {
    printf 'error: %s\n' "$2" >&2
    [ -z "${3:-}" ] || printf 'hint: %s\n' "$3" >&2
    exit "$1"
}

# need PROGRAM...: fail unless they are there
need() {
    local program
    for program in "$@"; do
        command -v "$program" >/dev/null || fail 3 "$program: not found, and it is needed here" \
            "install it; Debian's package has the same name"
    done
}

# begin ARGUMENTS...: set dir, the one argument or the default, and make it
begin() {
    [ $# -le 1 ] || fail 2 "expected at most one argument, the directory to write to, got $#"
    case ${1:-} in -*) fail 2 "$1: expected a directory to write to, got an option" ;; esac
    dir=${1:-corpora}
    case $dir in /*) ;; *) [ -z "${1:-}" ] || [ "$caller" = "$PWD" ] || dir=$caller/$dir ;; esac
    local said
    said=$(mkdir -p "$dir" 2>&1) || fail 3 "$dir: cannot make the directory: ${said##*: }"
}

# sha256 FILE or, for -, stdin
sha256() {
    if command -v sha256sum >/dev/null; then sha256sum "$1"; else shasum -a 256 "$1"; fi |
        cut -d ' ' -f 1
}

# wrong FILE CHECK: what is wrong with it, in words; nothing, and code 1, if it is right. CHECK is
# sha256:HASH, gunzipped:HASH (of what the gzip file holds) or zip (checksums of its members)
wrong() {
    local got
    case $2 in
    sha256:*) got=$(sha256 "$1") ;;
    gunzipped:*) got=$(gzip -dc "$1" 2>/dev/null | sha256 -) ;;
    zip)
        python3 -c 'import sys, zipfile
sys.exit(zipfile.ZipFile(sys.argv[1]).testzip() is not None)' "$1" 2>/dev/null && return 1
        echo "it is no zip file, or not a whole one" && return
        ;;
    esac
    [ "$got" != "${2#*:}" ] && echo "expected SHA-256 ${2#*:}, got $got"
}

# download ADDRESS PART: go on with PART, or begin it; prints what went wrong. Code 1: the network;
# 2: the server cannot go on from where PART ends
download() {
    local said code go=() quiet=-s
    [ ! -s "$2" ] || go=(-C -)
    [ ! -t 2 ] || quiet=-#
    said=$(curl -fL $quiet --retry 2 --connect-timeout 20 --speed-limit 1 --speed-time 60 \
        -w '%{http_code} %{errormsg}' ${go[@]+"${go[@]}"} -o "$2" "$1")
    code=$?
    [ $code != 0 ] || return 0
    echo "${said#* } (curl's code $code)"
    case $code,${said%% *} in 22,416 | 33,* | 36,*) return 2 ;; esac
    return 1
}

# fetch FILE CHECK ADDRESS...: FILE, right, from the first address that gives it
fetch() {
    local file=$1 check=$2 part=$1.part address said code resumed
    shift 2
    case $check in sha256:*) check=sha256:${SHA256:-${check#*:}} ;; esac
    if [ -e "$file" ]; then
        ! said=$(wrong "$file" "$check") || fail 3 "$file: $said" "remove it to have it fetched"
        return 0
    fi
    if [ -s "$part" ] && ! said=$(wrong "$part" "$check"); then
        mv "$part" "$file" || exit 3
        return 0
    fi
    need curl
    [ -z "${MIRROR:-}" ] || set -- "${MIRROR%/}/${file##*/}"
    for address in "$@"; do
        while :; do
            resumed=$([ ! -s "$part" ] || echo yes)
            echo "$address${resumed:+, from byte $(wc -c <"$part")}"
            said=$(download "$address" "$part")
            code=$?
            if [ $code = 0 ]; then
                if ! said=$(wrong "$part" "$check"); then
                    mv "$part" "$file" || exit 3
                    return 0
                fi
                said="$said, of what it sends"
            fi
            [ $code = 1 ] || rm -f "$part" # a wrong one, or one that cannot go on
            if [ -z "$resumed" ] || [ $code = 1 ]; then break; fi
        done
    done
    fail 3 "$file: cannot fetch $address: $said" \
        "run it again to go on; MIRROR=ADDRESS takes another"
}

# debian DIR PACKAGE...: unpack Debian's packages in DIR, which needs no root; code 1 if there is no
# apt-get, or it does not find them
debian() {
    local to=$1 package
    shift
    command -v apt-get >/dev/null && command -v dpkg >/dev/null || return 1
    for package in "$@"; do
        echo "Debian's package $package"
        (cd "$to" && apt-get download "$package" && dpkg -x "$package"_*.deb .) >/dev/null 2>&1 ||
            return 1
    done
}

# scratch: set tmp, a directory in dir that is removed at the end
scratch() {
    tmp=$(mktemp -d "$dir/tmp-XXXXXX") || fail 3 "$dir: cannot write there"
    trap 'rm -rf "$tmp"' EXIT
    trap 'exit 130' INT TERM
}

# images OUT FORMAT ARGUMENTS...: OUT, made by data/images.py, and a line about it
images() {
    local out=$1 format=$2
    shift 2
    python3 data/images.py "$format" "$out" "$@" || exit
}

# there FILE: end well if the images are there, badly if they are not what they should be
there() {
    need python3
    [ ! -e "$1" ] || { python3 data/images.py show "$1" && exit 0; } || exit 3
}
