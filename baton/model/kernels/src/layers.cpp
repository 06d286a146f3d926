// Whole layers of a lean decoder in one call: the kernels of the other files, in the order of `LeanDecoder`.
//
// Between two calls from Python the interpreter's code and data have left the caches, which costs a step of few rows a
// tenth of its time. Called through `baton/model/decoders/native_layers.py`, which has checked shapes and types.
#include "attention_step.h"
#include "rope_params.h"
#include "simd.h"

BATON_API void baton_linear(bool, const void*, const void*, const void*, void*, int64_t, int64_t, int64_t);
BATON_API void baton_rms_norm(bool, const void*, void*, const float*, float, int64_t, int64_t, void*);
BATON_API void baton_act_and_mul(bool, bool, const void*, int64_t, int64_t, void*);
BATON_API void baton_rope_and_write_kv(bool, const RopeParams*, const void*, const int64_t*, const int64_t*,
                                       const int64_t*, int64_t, void*, void*, void*);
BATON_API void baton_attend(bool, const AttentionLayer*, const Segments*);

namespace {

struct PanelWeight {
    const void *panels, *bias;  // no bias: null
    int64_t num_in, num_out;
};

struct DecoderLayer {
    PanelWeight qkv, attention_out, gate_up, down;
    const float *feed_forward_norm, *next_norm;  // `next_norm`: of the next layer's attention
    RopeParams rope;
    void *keys, *values;       // of page 0, as rope takes them
    AttentionLayer attention;  // without `query` and `out`
};

struct LayerStep {  // of all layers; buffers have rows of `num_tokens`
    bool is_bf16, is_gelu;
    float eps;
    int64_t num_tokens, hidden_size;
    void *hidden, *residual;                                     // [tokens, hidden_size], in and out
    void *qkv, *query, *attended, *change, *gate_up, *activated;  // scratch
    const int64_t *positions, *pages, *slots;                    // of the tokens
    const Segments* segments;
};

void multiply(const LayerStep& s, const PanelWeight& m, const void* x, void* out) {
    baton_linear(s.is_bf16, x, m.panels, m.bias, out, s.num_tokens, m.num_in, m.num_out);
}

void add_and_norm(const LayerStep& s, const float* weight) {
    baton_rms_norm(s.is_bf16, s.change, s.residual, weight, s.eps, s.num_tokens, s.hidden_size, s.hidden);
}

}  // namespace

BATON_API void baton_run_layers(const DecoderLayer* layers, int64_t num_layers, const LayerStep* step) {
    const LayerStep& s = *step;
    for (const DecoderLayer* layer = layers; layer < layers + num_layers; layer++) {
        multiply(s, layer->qkv, s.hidden, s.qkv);
        baton_rope_and_write_kv(s.is_bf16, &layer->rope, s.qkv, s.positions, s.pages, s.slots, s.num_tokens,
                                layer->keys, layer->values, s.query);
        AttentionLayer attention = layer->attention;
        attention.query = s.query, attention.out = s.attended;
        baton_attend(s.is_bf16, &attention, s.segments);
        multiply(s, layer->attention_out, s.attended, s.change);
        add_and_norm(s, layer->feed_forward_norm);
        multiply(s, layer->gate_up, s.hidden, s.gate_up);
        baton_act_and_mul(s.is_bf16, s.is_gelu, s.gate_up, s.num_tokens, layer->down.num_in, s.activated);
        multiply(s, layer->down, s.activated, s.change);
        add_and_norm(s, layer->next_norm);
    }
}
