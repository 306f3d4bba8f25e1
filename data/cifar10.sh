#!/usr/bin/env bash
# cifar10.sh: DIR/cifar10.images, 50,000 + 10,000 images of 32 x 32 x 3 in 10 classes, for --images.
#
#     bash data/cifar10.sh [DIR]
#
# From the authors' address (170 MB). Mean and deviation are those of the CausalRN paper's Fig. 7,
# not measured. The rest is as in data/fetch.sh.
. "$(dirname "$0")/fetch.sh"
begin "$@"
out=$dir/cifar10.images
there "$out"
fetch "$dir/cifar-10-binary.tar.gz" \
    sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd \
    https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz
need tar
scratch
tar -xzf "$dir/cifar-10-binary.tar.gz" -C "$tmp" 2>/dev/null ||
    fail 3 "$dir/cifar-10-binary.tar.gz: cannot unpack it"
bin=$tmp/cifar-10-batches-bin
images "$out" cifar10 --train "$bin"/data_batch_{1,2,3,4,5}.bin --test "$bin/test_batch.bin" \
    --mean .4914 .4822 .4465 --deviation .2023 .1994 .2010
