// Everything that a generated kernel calls.
#pragma once

#include "accumulate.cuh"
#include "batch.cuh"
#include "complex.cuh"
#include "fetch.cuh"
#include "functions.cuh"
#include "gather.cuh"
#include "gemm.cuh"
#include "map.cuh"
#include "near.cuh"
#include "outer.cuh"
#include "pack.cuh"
#include "quad.cuh"
#include "reduce.cuh"
#include "stream.cuh"
#include "tile.cuh"
