// scan_complex.cu
#include "scan_ladder.cuh"

int main(int argc, char **argv)
{
    return scan_main<Complex>(argc, argv, "scan_complex: h_t = a_t h_{t-1} + x_t over T of (B,T,C),"
                              " complex64, and its gradient");
}
