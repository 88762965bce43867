#include "bgemm_kernels.h"

template const jaxmagma::Bgemm& jaxmagma::GetBgemm<jaxmagma::Complex<float>>(int size);
