// What an implementation's translation units have of each other; included in its namespace. How
// packed heads are read (PartKernels), by name: of codes, for parts whose heads have their own
// metadata, and of sorted keys.

extern const PartKernels code_kernels[24];
extern const PartKernels sorted_kernels[1];

// Of codes on their way in and back (isa/table.h).
void from_f16(const std::uint16_t* from, float* to, std::size_t count) noexcept;
void find_windows(unsigned bits, Part part, const float* y, std::size_t stride, unsigned channels,
                  std::uint8_t* windows) noexcept;
void encode_sorted(const codec::SortedPart& part, const std::uint16_t* rows, SortedSource source,
                   std::byte* section) noexcept;
void decode_sorted(const codec::SortedPart& part, const std::byte* section,
                   std::uint16_t* rows) noexcept;
