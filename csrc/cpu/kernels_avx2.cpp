// The CPU kernels, compiled for AVX2.

#include "table.h"

const boost::cpu::Kernels& boost::cpu::kernels_avx2() { return AVX2::kTable; }
