// SPDX-License-Identifier: Apache-2.0
// What a scene's results are compared with: rows that gather() reads back, in double precision.
#include <cuda_runtime_api.h>

#include <cmath>

#include "cuda_scene.h"

namespace bitdecoding::cli {

Status CudaScene::gather(std::int64_t begin, std::int64_t end, bool with_shadow,
                         std::vector<float>* key, std::vector<float>* value) {
  const std::int64_t row = std::int64_t{options_.kv_heads} * options_.head_dim;
  const std::int64_t elements = (end - begin) * row;
  CudaGather what;
  what.begin = begin;
  what.end = end;
  what.with_shadow = with_shadow;
  what.dtype = DType::kF32;
  what.stride_token = row;
  what.stride_head = options_.head_dim;
  what.key = gathered_.as<float>();
  what.value = gathered_.as<float>() + elements;
  Status status = backend_->gather(attend_params(0), what, *plan_, nullptr);
  if (!status.ok()) return status;
  std::vector<float> both(static_cast<std::size_t>(2 * elements));
  status = gathered_.get(both.data(), both.size() * sizeof(float));
  if (!status.ok()) return status;
  key->assign(both.begin(), both.begin() + elements);
  value->assign(both.begin() + elements, both.end());
  return {};
}

Result<double> CudaScene::attend_error() {
  const int group = options_.q_heads / options_.kv_heads;
  const auto dim = static_cast<std::size_t>(options_.head_dim);
  const std::size_t stride = static_cast<std::size_t>(options_.kv_heads) * dim;
  // Online softmax of each query head over all positions; one query row, as decode has it.
  std::vector<double> top(static_cast<std::size_t>(group), -INFINITY);
  std::vector<double> sum(top.size(), 0.0);
  std::vector<double> exact(top.size() * dim, 0.0);
  const double scale = static_cast<double>(attend_params(0).sm_scale);
  std::vector<float> key;
  std::vector<float> value;
  for (std::int64_t begin = 0; begin < first_ + 1; begin += chunk_) {
    const std::int64_t end = std::min(begin + chunk_, first_ + 1);
    if (Status s = gather(begin, end, true, &key, &value); !s.ok()) return s;
    for (std::size_t h = 0; h < top.size(); ++h) {
      const float* q = query_.data() + h * dim;
      for (std::size_t p = 0; p < static_cast<std::size_t>(end - begin); ++p) {
        double score = 0;
        for (std::size_t d = 0; d < dim; ++d) score += double{q[d]} * double{key[p * stride + d]};
        score *= scale;
        const double most = std::max(top[h], score);
        const double alpha = std::exp(top[h] - most);
        const double weight = std::exp(score - most);
        top[h] = most;
        sum[h] = sum[h] * alpha + weight;
        for (std::size_t d = 0; d < dim; ++d) {
          double& x = exact[h * dim + d];
          x = x * alpha + weight * double{value[p * stride + d]};
        }
      }
    }
  }
  std::vector<float> got(exact.size());
  // Poisoned first: a row that was not written cannot pass for a result.
  std::vector<float> poison(got.size(), NAN);
  Status status = output_.put(poison.data(), poison.size() * sizeof(float));
  if (status.ok()) status = backend_->attend(attend_params(0), *plan_, nullptr);
  if (status.ok()) status = output_.get(got.data(), got.size() * sizeof(float));
  if (!status.ok()) return status;
  double error = 0;
  double norm = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double want = exact[i] / sum[i / dim];
    error += std::pow(got[i] - want, 2);
    norm += std::pow(want, 2);
  }
  return std::sqrt(error / norm);
}

Result<double> CudaScene::write_error() {
  std::vector<float> key;
  std::vector<float> value;
  const std::int64_t count = std::min(count_, chunk_);
  if (Status s = gather(first_, first_ + count, false, &key, &value); !s.ok()) return s;
  double error = 0;
  double norm = 0;
  for (std::size_t i = 0; i < key.size(); ++i) {
    error += std::pow(double{key[i]} - key_[i], 2) + std::pow(double{value[i]} - value_[i], 2);
    norm += std::pow(double{key_[i]}, 2) + std::pow(double{value_[i]}, 2);
  }
  return std::sqrt(error / norm);
}

}  // namespace bitdecoding::cli
