// The CPU kernels, compiled for any processor of the architecture.

#include "table.h"

const boost::cpu::Kernels& boost::cpu::kernels_default() { return DEFAULT::kTable; }
