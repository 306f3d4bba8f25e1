#!/usr/bin/env bash
# cifar5m.sh: DIR/cifar5m.images, images of 32 x 32 x 3 in 10 classes that a diffusion model trained
# on CIFAR-10 made, for --images: 5 x 1,000,448 to train on, the sixth part to evaluate on.
#
#     bash data/cifar5m.sh [DIR]
#     PARTS="0 1" bash data/cifar5m.sh [DIR]       DIR/cifar5m-01.images: fewer of the parts 0 to 4
#
# From the authors' address, about 3 GB a part and as much again in the file that is made. No
# SHA-256 is published that we know of: a part is right if the checksums in it (CRC-32) and its
# sizes are, and the script prints the SHA-256 of what came. Mean and deviation are as in
# data/cifar10.sh. The rest is as in data/fetch.sh.
. "$(dirname "$0")/fetch.sh"
begin "$@"
parts=() out=$dir/cifar5m
for part in 0 1 2 3 4; do
    [[ " ${PARTS:=0 1 2 3 4} " != *" $part "* ]] || parts+=("$part")
done
[ "${parts[*]-}" = "$PARTS" ] ||
    fail 2 "PARTS: expected some of 0 1 2 3 4, in order, got \"$PARTS\""
[ ${#parts[@]} = 5 ] || out+=-${PARTS// /}
out+=.images
there "$out"
mkdir -p "$dir/cifar5m" || exit 3
npz=()
for part in "${parts[@]}" 5; do
    file=$dir/cifar5m/part$part.npz
    fetch "$file" zip "https://storage.googleapis.com/gresearch/cifar5m/part$part.npz"
    echo "$file: $(wc -c <"$file") bytes, SHA-256 $(sha256 "$file")"
    npz+=("$file")
done
images "$out" npz --train "${npz[@]:0:${#parts[@]}}" --test "$dir/cifar5m/part5.npz" \
    --mean .4914 .4822 .4465 --deviation .2023 .1994 .2010
