#include "axes.h"

#include <algorithm>

namespace jaxmagma {
namespace {

// No offset of an element in an array overflows, nor does any sum or product of extents.
constexpr int64_t kMostElements = int64_t{1} << 60;

std::string ShapeText(const Array& array) {
  std::string text = "(";
  for (size_t i = 0; i < array.rank; ++i) text += (i ? ", " : "") + std::to_string(array.dims[i]);
  return text + (array.rank == 1 ? ",)" : ")");
}

// Fits one array to its axes, learning the extents that are not known yet (-1).
std::string Fit(const std::string& name, const Array& array, const std::vector<int64_t>& batch,
                const std::vector<int64_t>& tile, std::vector<int64_t>& extents) {
  bool fits = array.rank == batch.size() + tile.size();
  for (size_t i = 0; fits && i < batch.size(); ++i) {
    int64_t& extent = extents[batch[i]];
    if (extent < 0) extent = array.dims[i];
    fits = extent == array.dims[i];
  }
  fits = fits && std::equal(tile.begin(), tile.end(), array.dims + batch.size());
  return fits ? "" : name + " of shape " + ShapeText(array) + " does not fit the plan";
}

std::string FindExtents(const Plan& plan, const std::vector<Array>& arguments,
                        const std::vector<Array>& results, std::vector<int64_t>& extents) {
  size_t number = 0;
  for (const Input& input : plan.inputs) {
    if (input.kind == Input::kConstant) continue;
    if (number == arguments.size()) return "too few operands";
    const std::string name = "operand " + std::to_string(number);
    const std::string error = Fit(name, arguments[number++], input.batch, input.tile, extents);
    if (!error.empty()) return error;
  }
  if (number != arguments.size()) return "too many operands";
  if (results.size() != plan.outputs.size()) return "wrong number of results";
  for (size_t o = 0; o < results.size(); ++o) {
    const std::string name = "result " + std::to_string(o);
    const Output& output = plan.outputs[o];
    const std::string error = Fit(name, results[o], output.batch, output.tile, extents);
    if (!error.empty()) return error;
  }
  int64_t elements = 1;
  for (int64_t extent : extents) {
    if (extent < 0) return "no operand carries one of the batch axes";
    if (std::max<int64_t>(extent, 1) > kMostElements / elements) return "too many elements";
    elements *= std::max<int64_t>(extent, 1);
  }
  return "";
}

// Strides in tiles of an array whose batch axes are `batch`, by axis of the program.
std::vector<int64_t> TileStrides(const std::vector<int64_t>& batch,
                                 const std::vector<int64_t>& extents) {
  std::vector<int64_t> strides(extents.size(), 0);
  int64_t stride = 1;
  for (size_t i = batch.size(); i-- > 0;) {
    strides[batch[i]] = stride;
    stride *= extents[batch[i]];
  }
  return strides;
}

bool Has(const std::vector<int64_t>& list, int64_t x) {
  return std::find(list.begin(), list.end(), x) != list.end();
}

}  // namespace

std::string FindAxes(const Plan& plan, const std::vector<Array>& arguments,
                     const std::vector<Array>& results, std::vector<Axis>& axes) {
  std::vector<int64_t> extents(plan.batch_rank, -1);
  const std::string error = FindExtents(plan, arguments, results, extents);
  if (!error.empty()) return error;

  axes.resize(extents.size());
  for (size_t a = 0; a < axes.size(); ++a) axes[a].extent = extents[a];
  for (const Input& input : plan.inputs) {
    const std::vector<int64_t> strides = TileStrides(input.batch, extents);
    for (size_t a = 0; a < axes.size(); ++a) axes[a].inputs.push_back(strides[a]);
  }
  for (const Output& output : plan.outputs) {
    const std::vector<int64_t> strides = TileStrides(output.batch, extents);
    for (size_t a = 0; a < axes.size(); ++a) {
      axes[a].outputs.push_back(strides[a]);
      axes[a].use.push_back(Has(output.batch, a)    ? Use::kKept
                            : Has(output.summed, a) ? Use::kSummed
                                                    : Use::kIgnored);
    }
  }
  axes.erase(std::remove_if(axes.begin(), axes.end(), [](const Axis& x) { return x.extent == 1; }),
             axes.end());
  return "";
}

void OrderByMemory(const Plan& plan, std::vector<Axis>& axes) {
  size_t largest = 0;
  double most = -1;
  for (size_t i = 0; i < plan.inputs.size(); ++i) {
    if (plan.inputs[i].kind == Input::kVector) continue;
    double size = static_cast<double>(plan.inputs[i].size);
    for (const Axis& axis : axes) size *= axis.inputs[i] ? static_cast<double>(axis.extent) : 1;
    if (size > most) largest = i, most = size;
  }
  std::stable_sort(axes.begin(), axes.end(), [&](const Axis& a, const Axis& b) {
    return a.inputs[largest] > b.inputs[largest];
  });
}

std::vector<Axis> Collapse(const std::vector<Axis>& axes) {
  const auto continues = [](const std::vector<int64_t>& outer, const std::vector<int64_t>& inner,
                            int64_t extent) {
    return std::equal(outer.begin(), outer.end(), inner.begin(),
                      [extent](int64_t a, int64_t b) { return a == b * extent; });
  };
  std::vector<Axis> collapsed;
  for (const Axis& axis : axes) {
    if (!collapsed.empty()) {
      Axis& outer = collapsed.back();
      if (outer.use == axis.use && continues(outer.inputs, axis.inputs, axis.extent) &&
          continues(outer.outputs, axis.outputs, axis.extent)) {
        const int64_t extent = outer.extent * axis.extent;
        outer = axis;
        outer.extent = extent;
        continue;
      }
    }
    collapsed.push_back(axis);
  }
  return collapsed;
}

}  // namespace jaxmagma
