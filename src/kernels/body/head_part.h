// Where attention finds a head. Included inside an implementation's namespace.

// A head's keys or values in any block, exact or packed. Assembled from scalars where it is used: a
// copy of what was just written by parts would wait for it.
struct HeadPart {
    const PackedPart& part;
    const std::byte* BlockView::* start;
    unsigned head, lane_count, step_count;
    std::size_t section_offset, exact_offset, exact_stride;
    RowType rows;  // of blocks that are not packed

    HeadPart(const Plan& plan, const PackedPart& its_part, const std::byte* BlockView::* its_start,
             unsigned its_head)
        : part(its_part),
          start(its_start),
          head(its_head),
          lane_count(part.shape().lanes()),
          step_count(part.shape().steps()),
          section_offset(part.section_offset(head)),
          exact_offset(part.shape().exact_offset(head)),
          exact_stride(part.shape().exact_stride()),
          rows(plan.rows()) {}

    bool is_keys() const { return part.shape().part == Part::keys; }
    bool is_exact(const BlockView& block) const { return !block.packed || part.exact(); }
    // What an exact part of a packed block holds is f16, as all that quantizers pack.
    RowType type(const BlockView& block) const { return block.packed ? RowType::f16 : rows; }
    // Steps of lanes.
    template <class T>
    const T* exact(const BlockView& block) const {
        return reinterpret_cast<const T*>(block.*start) + exact_offset;
    }
    PackedHead packed(const BlockView& block) const {
        const std::byte* data = block.*start;
        return {&part, data + section_offset, data, head, lane_count, step_count};
    }
};
