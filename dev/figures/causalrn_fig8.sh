#!/usr/bin/env bash
# causalrn_fig8.sh: what a trained Linear BiRN looks at: of each patch the norm of exp(a + b) over
# channels, a <CLS>'s and b the patch's in the last block (the sixth; the paper has twelve and shows
# the sixth), both normalized; as a share of all patches, beside the image. The run is
# causalrn_fig7.sh's, which is not made twice, and so is the environment; 16 images, of those
# trained on.
MAPS=1 exec bash "$(dirname "$0")/causalrn_fig7.sh" "$@"
