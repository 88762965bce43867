#include "bgemm_table.h"

template const jaxmagma::Bgemm& jaxmagma::GetBgemm<jaxmagma::Complex<float>>(int size);
