// scan_real.cu
#include "scan_ladder.cuh"

#ifdef PRECISION_BF16
typedef __nv_bfloat16 floatX;
#define TYPE_NAME "bf16, states fp32"
#else
typedef float floatX;
#define TYPE_NAME "fp32"
#endif

int main(int argc, char **argv)
{
    return scan_main<floatX>(argc, argv, "scan_real: h_t = a_t h_{t-1} + x_t over T of (B,T,C), "
                             TYPE_NAME ", and its gradient");
}
