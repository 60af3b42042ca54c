// Encoding and decoding by one implementation, where it takes time.

#include "begin.h"
//
#include "kernels/body/trellis.h"
//
#include "kernels/body/reaches.h"
//
#include "kernels/body/sorted_section.h"
//
#include "kernels/body/sorted_encode.h"
//
#include "kernels/body/sorted_write.h"
//
#include "kernels/body/sorted_decode.h"

}  // namespace lowkv::kernels::LOWKV_IMPLEMENTATION
LOWKV_REGION_END
