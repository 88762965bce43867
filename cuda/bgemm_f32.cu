#include "bgemm_kernels.h"

template const jaxmagma::Bgemm& jaxmagma::GetBgemm<float>(int size);
