#include "bgemm_kernels.h"

template const jaxmagma::Bgemm& jaxmagma::GetBgemm<double>(int size);
