#include "bgemm_table.h"

template const jaxmagma::Bgemm& jaxmagma::GetBgemm<jaxmagma::Complex<double>>(int size);
