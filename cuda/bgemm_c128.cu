#include "bgemm_kernels.h"

template const jaxmagma::Bgemm& jaxmagma::GetBgemm<jaxmagma::Complex<double>>(int size);
