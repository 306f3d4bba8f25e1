#!/usr/bin/env bash
# causalrn_fig8.sh: what a trained Linear BiRN looks at: of each patch the norm of exp(a + b) over
# channels, a <CLS>'s and b the patch's in the sixth block (the paper's; of Fashion-MNIST's six the
# last), both normalized; as a share of all patches, below the image. The run is causalrn_fig7.sh's,
# which is not made twice, and so is the environment; SHOWN=10 images, of those trained on. It draws
# the dump of that run, which DRAW_ONLY=1 needs too.
MAPS=1 exec bash "$(dirname "$0")/causalrn_fig7.sh" "$@"
