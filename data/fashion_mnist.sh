#!/usr/bin/env bash
# fashion_mnist.sh: DIR/fashion_mnist.images, 60,000 + 10,000 grey images of 28 x 28 in 10 classes,
# for --images; MIT.
#
#     bash data/fashion_mnist.sh [DIR]
#
# From Debian's package dataset-fashion-mnist if it is installed, or if apt-get can fetch it, which
# needs no root; otherwise from the authors' address (31 MB). The hashes are of what the gzip files
# hold. The rest is as in data/fetch.sh.
. "$(dirname "$0")/fetch.sh"
begin "$@"
out=$dir/fashion_mnist.images
there "$out"
files=(train-images-idx3-ubyte train-labels-idx1-ubyte t10k-images-idx3-ubyte
    t10k-labels-idx1-ubyte)
hashes=(c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888
    bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9
    5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b
    0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34)
scratch
from=/usr/share/datasets/fashion-mnist
if [ -z "${MIRROR:-}" ] && [ ! -d $from ] && debian "$tmp" dataset-fashion-mnist; then
    from=$tmp$from
fi
gz=()
for i in "${!files[@]}"; do
    file=${files[i]}.gz
    if [ -z "${MIRROR:-}" ] && [ -e "$from/$file" ]; then
        file=$from/$file
        ! said=$(wrong "$file" "gunzipped:${hashes[i]}") || fail 3 "$file: $said"
    else
        mkdir -p "$dir/fashion-mnist" || exit 3
        fetch "$dir/fashion-mnist/$file" "gunzipped:${hashes[i]}" \
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/$file"
        file=$dir/fashion-mnist/$file
    fi
    gz+=("$file")
done
images "$out" idx --train "${gz[@]:0:2}" --test "${gz[@]:2}"
