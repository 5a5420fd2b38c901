// The CPU kernels, compiled for AVX512.

#include "table.h"

const boost::cpu::Kernels& boost::cpu::kernels_avx512() { return AVX512::kTable; }
