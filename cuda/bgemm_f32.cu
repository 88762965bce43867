#include "bgemm_table.h"

template const jaxmagma::Bgemm& jaxmagma::GetBgemm<float>(int size);
